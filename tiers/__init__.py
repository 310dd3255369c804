"""Where bytes lie: memory regions and what is in them. Tiers hold opaque frames and know no keys."""
