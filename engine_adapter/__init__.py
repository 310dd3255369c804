"""What runs inside an engine's process, on top of ``kvstore.client``: layouts, copies, loads, saves, connectors."""
