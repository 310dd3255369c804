"""The NVMe tier: segments of frames behind one seam for files, and a catalog that names what is durable."""
