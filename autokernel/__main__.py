"""`python -m autokernel`."""

from autokernel.cli import main

if __name__ == "__main__":
    main()
