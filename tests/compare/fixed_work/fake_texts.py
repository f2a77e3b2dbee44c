"""Stands in for `recipes.demo_model.record_texts`, which takes half a minute."""

import json
import sys

TEXTS = {"format": 1, "conversations": [{"prompt": [1, 2, 3], "tool_outputs": [[4, 3], [5, 3]]}]}

if __name__ == "__main__":
    with open(sys.argv[sys.argv.index("--out") + 1], "w") as file:
        json.dump(TEXTS, file)
