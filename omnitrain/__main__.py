"""`python -m omnitrain` runs the `omnitrain` command."""

from omnitrain.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
