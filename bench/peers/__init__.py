"""The store side by side with other stores on this machine: the same blocks, one run, in turn."""
