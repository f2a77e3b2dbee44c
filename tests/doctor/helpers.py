"""What the tests of the doctor share."""


def by_name(checks):
    return {item.name: item for item in checks}


def assert_remedies(checks):
    """What is wrong has a remedy, what is right needs none."""
    for item in checks:
        assert bool(item.remedy) == (item.status != "ok"), item
