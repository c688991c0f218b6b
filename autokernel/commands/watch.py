def watch() -> None:
    """x"""
