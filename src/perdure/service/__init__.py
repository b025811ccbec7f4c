"""Every use case a caller has; the only door for bindings, CLI and console."""
