"""Benchmarks of cuflash against its peers. Start with NOTES.md; each script has ``--help``."""
