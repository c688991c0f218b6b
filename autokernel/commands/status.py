def status() -> None:
    """x"""
