"""The daemon: sessions, connections and handlers around one store."""
