"""The command line, the run file and everything that joins the two stages."""

__version__ = "0.1.0"
