"""Model clients behind one port: adapters over the vendors' own clients, and a scripted fake."""
