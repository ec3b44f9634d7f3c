"use strict";
// Tables of runs, and several runs beside each other.

function showRuns(data) {}
function showComparison(data) {}
