// Fetches the state of the run every two seconds. The slider stays where the reader has put it; at
// its right end it follows the run.
"use strict";
let steps = []; // of the milestones with a grid
const parts = {}; // the HTML of each part, as it was fetched

function show() {
  const step = steps[Number(byId("slider").value)];
  const address = `grid/${step}.png`;
  if (byId("grid").getAttribute("src") !== address) byId("grid").setAttribute("src", address);
  byId("grid").alt = `Samples of step ${step}`;
  byId("caption").textContent = `Step ${step.toLocaleString("en")}`;
}

function update(view) {
  document.title = view.title;
  for (const part of ["head", "curves"]) {
    if (parts[part] === view[part]) continue; // a reader may be selecting its text
    byId(part).innerHTML = parts[part] = view[part];
  }
  const slider = byId("slider");
  const follows = steps.length === 0 || Number(slider.value) === steps.length - 1;
  steps = view.grids;
  byId("samples").hidden = steps.length === 0;
  if (steps.length === 0) return;
  slider.max = steps.length - 1;
  if (follows) slider.value = steps.length - 1;
  slider.hidden = steps.length === 1;
  show();
}

byId("slider").addEventListener("input", show);
follow(update, 2000);
