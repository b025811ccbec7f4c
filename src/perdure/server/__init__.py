"""HTTP building blocks that all bindings share."""
