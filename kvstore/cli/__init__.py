"""The command line: puts the parts together and runs them."""
