"use strict";
{
  const data = JSON.parse(document.getElementById("data").textContent);
  ({ run: show, runs: showRuns, sweep: showSweep, compare: showComparison })[data.kind](data);
  drawn();
}
