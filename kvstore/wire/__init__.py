"""Messages, framing and array packing shared by client and server; knows nothing of either."""
