"""`python -m troupe` is the `troupe` command."""

from troupe.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
