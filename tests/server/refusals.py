"""The statuses by which the API refuses a request that does not fit."""

REFUSALS = [
    "400",
    "401",
    "403",
    "404",
    "405",
    "406",
    "409",
    "410",
    "413",
    "415",
    "422",
    "428",
    "429",
]
"""How a server may refuse what does not fit; 410: the thread was deleted by a request before."""
