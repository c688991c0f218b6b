"""Nothing changed."""
