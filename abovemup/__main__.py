"""`python -m abovemup`."""

from abovemup.cli.main import main

if __name__ == "__main__":
    main()
