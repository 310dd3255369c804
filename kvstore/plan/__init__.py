"""How KV gets to a GPU best: link facts, measured rates, and whether to load, read in place, or compute again."""
