"""A module for each kind of system that is measured; ``driver.py`` runs it, in the system's environment."""
