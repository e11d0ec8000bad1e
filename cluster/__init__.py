"""Control plane and the user's entry points."""
