"""The queries of the board and of the rules in deploy/."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
BOARD = DEPLOY / "grafana" / "octavo.json"
RULES = DEPLOY / "prometheus" / "rules.yml"


def board_queries() -> list[tuple[str, str]]:
    """(row and panel, query) of the board, with its variables at what they are at first."""
    found, row = [], ""
    for panel in json.loads(BOARD.read_text())["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
        for target in panel.get("targets", []):
            query = target["expr"].replace("$model_name", ".*").replace("$instance", ".*")
            found.append((f"{row}: {panel['title']}", query))
    return found


def rules() -> list[dict[str, Any]]:
    """Recording rules and alerts."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def rule_queries() -> list[tuple[str, str]]:
    """(name, query) of the rules; an alert's conditions without what they are compared with."""
    found = []
    for rule in rules():
        if "record" in rule:
            found.append((rule["record"], rule["expr"]))
        else:
            for part in re.split(r"\sand\s", rule["expr"]):
                found.append((rule["alert"], re.sub(r"\s(>|<|==)\s[\d.]+\s*$", "", part)))
    return found


def metric_names(query: str) -> set[str]:
    """Names of series that a query reads (not of recording rules)."""
    return set(re.findall(r"(?<![\w:])(?:octavo:\w+|http_\w+|process_\w+|up)(?=[{\[ )]|$)", query))
