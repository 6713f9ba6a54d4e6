"""Mutation tests: small defects put into the source one at a time, each of which a test should notice.

`operators` finds the places, `coverage_map` says which tests reach them, `trial` runs those tests on one mutant, `campaign` keeps
the results, `summary` counts them. `make mutants` does all of it.
"""
