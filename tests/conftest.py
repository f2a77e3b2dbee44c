"""Order of the whole suite: what fails within seconds comes first, what trains for minutes last."""


def cost(item):
    """0 for fast tests, 1 for those that load verl, vLLM or Ray, 2 for real training."""
    return 2 if item.get_closest_marker("e2e") else 1 if item.get_closest_marker("upstream") else 0


def pytest_collection_modifyitems(items):
    items.sort(key=cost)
