// What live pages have in common: they fetch their content again and again.
"use strict";
const byId = (id) => document.getElementById(id);

async function follow(update, milliseconds) {
  try {
    const response = await fetch("live");
    if (!response.ok) throw new Error(response.statusText);
    update(await response.json());
    byId("offline").hidden = true;
  } catch {
    byId("offline").hidden = false;
  }
  setTimeout(follow, milliseconds, update, milliseconds);
}
