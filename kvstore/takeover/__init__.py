"""Restarting with warm DRAM: what a daemon keeps with a holder, and how the next one takes it over."""
