"use strict";
{
  const data = JSON.parse(document.getElementById("data").textContent);
  const show = { run: showRun, runs: showRuns, sweep: showSweep, compare: showComparison }[
    data.kind
  ];
  show(data);
  measureDrawing();
}
