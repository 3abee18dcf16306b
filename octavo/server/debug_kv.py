"""`/debug/kv`: the pool of KV blocks as a map, for a person in a browser or a program (`/debug/kv.json`)."""

from __future__ import annotations

from urllib.parse import parse_qs

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from octavo.kv.map import STATES
from octavo.messages import KVMap
from octavo.server.errors import bad_request
from octavo.server.service import Service

MOST_CELLS = 4096
"""Cells of an answer, of the pool and again of the host tier; larger pools have several blocks in a cell."""


class KVMapResponse(msgspec.Struct):
    """The pool at one moment.

    `cells` has a digit per cell, an index into `states`: what most of the cell's `blocks_per_cell` blocks
    are. `counts` are exact; `host_copies` are device blocks whose contents are in the host tier as well.
    `host_cells` has a digit per cell of the host tier: 1 where most slots hold a block.
    """

    states: list[str]
    cells: str
    blocks_per_cell: int
    num_blocks: int
    block_tokens: int
    block_bytes: int
    counts: dict[str, int]
    host_copies: int
    host_cells: str
    host_blocks_per_cell: int
    host_blocks: int
    num_running: int
    num_waiting: int


def kv_map_response(told: KVMap) -> KVMapResponse:
    """The core's answer as JSON tells it."""
    fields = {name: getattr(told, name) for name in KVMap.__struct_fields__ if name != "requests"}
    for name in ("cells", "host_cells"):
        fields[name] = "".join(map(str, fields[name]))
    return KVMapResponse(states=list(STATES), **fields)


async def kv_map(service: Service, scope: Scope, body: None) -> Response:
    """`GET /debug/kv.json?cells=N`: at most N cells, by default as many as there may be."""
    text = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("cells", [str(MOST_CELLS)])[-1]
    if not (text.isascii() and text.isdigit() and len(text) <= 8 and 1 <= int(text) <= MOST_CELLS):
        raise bad_request(f"cells={text[:32]!r} is out of range: give from 1 to {MOST_CELLS}", "cells")
    told = await service.engine.describe_kv(int(text))
    return Response(msgspec.json.encode(kv_map_response(told)), media_type="application/json")


async def kv_page(service: Service, scope: Scope, body: None) -> Response:
    """`GET /debug/kv`: the page; it holds no data and asks for it by itself."""
    return Response(
        PAGE,
        media_type="text/html",
        headers={"content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; "
                 "style-src 'unsafe-inline'; connect-src 'self'", "cache-control": "no-store"},
    )  # fmt: skip


PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>KV blocks</title>
<style>
  :root { color-scheme: light dark; font: 14px system-ui, sans-serif; }
  body { margin: 1rem; }
  canvas { display: block; margin: .5rem 0; image-rendering: pixelated; max-width: 100%; }
  .key { display: inline-block; margin-right: 1.2em; }
  .key i { display: inline-block; width: .9em; height: .9em; margin-right: .4em; vertical-align: -.1em; }
  #problem { color: #c0392b; }
</style>
<h1>KV blocks</h1>
<p id="summary">…</p>
<p id="legend"></p>
<canvas id="pool" aria-label="blocks of the device's pool"></canvas>
<div id="host" hidden>
  <p id="host-summary"></p>
  <canvas id="slots" aria-label="slots of the host tier"></canvas>
</div>
<p id="problem" role="alert"></p>
<p><label>API key, if the server asks for one: <input id="key" type="password" autocomplete="off"></label></p>
<script>
"use strict";
const COLORS = {free: "#d5d8dc", cached: "#5dade2", owned: "#27ae60", shared: "#f39c12"};
const SLOTS = ["#d5d8dc", "#8e44ad"];
const SIZE = 8;
const $ = id => document.getElementById(id);

function draw(canvas, cells, colors) {
  const columns = Math.max(1, Math.min(128, cells.length));
  canvas.width = columns * SIZE;
  canvas.height = Math.max(1, Math.ceil(cells.length / columns)) * SIZE;
  const pen = canvas.getContext("2d");
  for (let i = 0; i < cells.length; i++) {
    pen.fillStyle = colors[+cells[i]];
    pen.fillRect(i % columns * SIZE, Math.floor(i / columns) * SIZE, SIZE - 1, SIZE - 1);
  }
}

function show(map) {
  const gib = (map.num_blocks * map.block_bytes / 2 ** 30).toFixed(2);
  $("summary").textContent = `${map.num_blocks} blocks of ${map.block_tokens} tokens (${gib} GiB), ` +
    `${map.blocks_per_cell} in a cell; ${map.num_running} requests run, ${map.num_waiting} wait`;
  $("legend").replaceChildren(...map.states.map(state => {
    const key = document.createElement("span"), box = document.createElement("i");
    key.className = "key";
    key.dataset.state = state;
    box.style.background = COLORS[state];
    key.append(box, `${state} ${map.counts[state]}`);
    return key;
  }));
  draw($("pool"), map.cells, map.states.map(state => COLORS[state]));
  $("host").hidden = !map.host_blocks;
  if (map.host_blocks) {
    $("host-summary").textContent = `Host tier: ${map.host_blocks} slots, ${map.host_blocks_per_cell} in a ` +
      `cell; ${map.host_copies} of the device's blocks are in it too`;
    draw($("slots"), map.host_cells, SLOTS);
  }
}

async function refresh() {
  const headers = $("key").value ? {authorization: `Bearer ${$("key").value}`} : {};
  try {
    const answer = await fetch("kv.json", {headers});
    const body = await answer.json();
    if (!answer.ok) throw new Error(body.error.message);
    show(body);
    $("problem").textContent = "";
  } catch (error) {
    $("problem").textContent = error.message;
  }
  setTimeout(refresh, 1000);
}
refresh();
</script>
</html>
"""
