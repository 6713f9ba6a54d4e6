"""Deployments over NVFlare's cells: resident nodes that connect outwards, mutual TLS 1.3 with pinned certificates, bytes only.

Of NVFlare, the cells of its communication layer are used and nothing above them: no jobs, no admin console, no job store.
There is nothing on the network that takes code. Importing this package does not import NVFlare.
"""
