"""`python -m fedtail` is the command line."""

from fedtail.cli import main

if __name__ == "__main__":
    main()
