"""Copies between the store's blocks and pages in the memory of a GPU, or of the simulated device."""
