"""The table of classes on the page of limits: those that ``test_families.py`` compares with the unmodified model.

python -m tests.slapo_pipeline.family_table
"""

from __future__ import annotations

from .families import CLASSES, REFUSED, class_name

BACKSLASH = "\\"  # of regular expressions
ENDS = {
    "ForCausalLM": "causal",
    "ForMaskedLM": "masked",
    "ForConditionalGeneration": "sequence to sequence",
    "ForImageClassification": "images",
    "ForSequenceClassification": "sound",
    "ForCTC": "speech",
}


def table() -> str:
    """Classes by kind, and those that are refused."""
    found: dict[str, set[str]] = {end: set() for end in [*ENDS, ""]}
    for name in map(class_name, CLASSES):
        end = next((end for end in ENDS if name.endswith(end)), "")
        found[end].add(name.removesuffix(end))
    lines = ["| kind | classes | which |", "|---|---|---|"]
    for end, names in found.items():
        kind = f"{ENDS[end]}, `…{end}`" if end else "others"
        lines.append(f"| {kind} | {len(names)} | {', '.join(sorted(names, key=str.lower))} |")
    lines += ["", "| refused | why | what the message says |", "|---|---|---|"]
    for refused in dict.fromkeys(REFUSED.values()):
        names = [name for name in sorted(REFUSED) if REFUSED[name] == refused]
        lines.append(f"| {', '.join(names)} | {refused.why} | {refused.told.replace(BACKSLASH, '')} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
