"""Runs the `trivium` command as `python -m gateway`."""

from gateway.process.cli import main

if __name__ == "__main__":
    main()
