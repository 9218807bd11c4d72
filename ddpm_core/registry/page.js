// Draws images with POST /generate and shows them while they are drawn. Every few seconds it fetches
// which version answers; the form keeps what its reader has chosen.
"use strict";
const PIXELATED = 128; // pixels a side, below which enlarged images stay sharp
const BLEND = 12; // images from one seed to another
let model = null; // what the server tells of its model
let version = ""; // the HTML of the head and the fields that are shown
let running = null; // the AbortController of the request in progress
let opened = null; // the image in the dialog

// The form

function request() {
  const body = { previews: true };
  for (const field of byId("form").elements) {
    if (!field.name || field.value === "") continue;
    body[field.name] = field.type === "number" ? Number(field.value) : field.value;
  }
  return { ...body, ...original() };
}

function setField(name, value) {
  const field = byId("form").elements[name];
  if (!field) return;
  const before = field.value;
  field.value = value;
  if (field.value === "" && before !== "") field.value = before; // no such option
}

function say(text, bad = false) {
  byId("message").textContent = text;
  byId("message").className = bad ? "bad" : "";
}

// Drawing

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) yield JSON.parse(line);
  }
}

async function draw(body) {
  running?.abort();
  const mine = (running = new AbortController());
  const started = performance.now();
  let tiles = [];
  let answered = null;
  const source = { prompt: body.prompt, image: body.image, mask: body.mask, strength: body.strength };
  byId("stop").hidden = false;
  say("Waiting for the server …");
  byId("tiles").replaceChildren();
  byId("message").scrollIntoView({ behavior: "smooth", block: "nearest" }); // below the form on phones
  try {
    const response = await fetch("generate", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal: mine.signal,
    });
    if (!response.ok) throw new Error(await refusal(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error);
      if (event.count) {
        answered = event.version;
        tiles = Array.from({ length: event.count }, newTile);
        byId("tiles").replaceChildren(...tiles);
      }
      event.previews?.forEach((image, i) => show(tiles[event.at[i]], image));
      if (event.previews) say(`Step ${event.step} of ${event.steps}`);
      event.images?.forEach((image, i) =>
        finish(tiles[event.at[i]], { ...image, version: answered, source }));
    }
    if (tiles.some(isUnfinished)) throw new Error("The server stopped before all images were drawn.");
    const seconds = ((performance.now() - started) / 1000).toFixed(1);
    say(`${tiles.length} image${tiles.length === 1 ? "" : "s"} in ${seconds} s. Click one to enlarge it.`);
  } catch (error) {
    if (running !== mine) return; // another request has taken over
    if (error.name === "AbortError") say("Stopped.");
    else say(error instanceof TypeError ? "The connection to the server was lost." : error.message, true);
    tiles.filter(isUnfinished).forEach((tile) => tile.remove());
  }
  running = null;
  byId("stop").hidden = true;
}

async function refusal(response) {
  const error = await response.json().catch(() => ({})); // a proxy may answer something else
  return error.message ?? `The server answered with status ${response.status}.`;
}

function isUnfinished(tile) {
  return tile.classList.contains("unfinished");
}

function newTile() {
  const tile = document.createElement("button");
  tile.type = "button";
  tile.className = "unfinished";
  tile.disabled = true;
  tile.append(new Image());
  tile.firstChild.alt = "";
  if (model.size < PIXELATED) tile.firstChild.className = "pixelated";
  return tile;
}

function show(tile, image) {
  tile.firstChild.src = `data:image/png;base64,${image}`;
}

function finish(tile, image) {
  show(tile, image.image);
  tile.classList.remove("unfinished");
  tile.disabled = false;
  tile.firstChild.alt = nameOf(image);
  tile.title = nameOf(image);
  tile.addEventListener("click", () => open(image));
  if (image.class === null) return;
  const name = document.createElement("span");
  name.className = "name";
  name.textContent = image.class;
  tile.append(name);
}

// One image

function nameOf(image) {
  const seed = image.toward === undefined ? `seed ${image.seed}`
    : `${Math.round(100 * image.share)} % from seed ${image.seed} to ${image.toward}`;
  return `Image ${image.number}, ${seed}`;
}

function open(image) {
  opened = image;
  byId("name").textContent = nameOf(image);
  byId("large").src = byId("download").href = `data:image/png;base64,${image.image}`;
  byId("large").alt = nameOf(image);
  byId("large").className = model.size < PIXELATED ? "pixelated" : "";
  const label = image.class === null ? [] : [`class ${image.class}`];
  if (image.source.prompt) label.push(`“${image.source.prompt}”`);
  const facts = [...label, image.sampler, `${image.steps} steps`, `guidance ${image.guidance}`];
  if (image.source.image) facts.push(`from an image, strength ${image.source.strength}`);
  byId("facts").textContent = [...facts, `version ${image.version}`].join(" · ");
  byId("download").download = `seed-${image.seed}-image-${image.number}.png`;
  byId("classes").hidden = model.conditioning !== "class";
  byId("dialog").showModal();
}

// Returns the request that draws the opened image again.
function again() {
  const { number, seed, sampler, steps, guidance, source } = opened;
  const body = { n: 1, first: number, seed, sampler, steps, guidance, previews: true, ...source };
  return opened.class === null ? body : { ...body, class: opened.class };
}

function drawLike(change) {
  byId("dialog").close();
  draw({ ...again(), ...change });
}

// The image to start from, and the paint over what is redrawn

function original() {
  if (byId("original").hidden) return {};
  const image = byId("image").toDataURL("image/png");
  const strength = Number(byId("strength").value);
  return isPainted() ? { image, strength, mask: blackAndWhite() } : { image, strength };
}

function paintLayer() {
  return byId("mask").getContext("2d", { willReadFrequently: true });
}

function pixelsOfPaint() {
  return paintLayer().getImageData(0, 0, model.size, model.size);
}

function isPainted() {
  return pixelsOfPaint().data.some((value, i) => i % 4 === 3 && value > 127);
}

function blackAndWhite() {
  const pixels = pixelsOfPaint();
  for (let i = 0; i < pixels.data.length; i += 4) {
    pixels.data.fill(pixels.data[i + 3] > 127 ? 255 : 0, i, i + 3);
    pixels.data[i + 3] = 255;
  }
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = model.size;
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  return canvas.toDataURL("image/png");
}

function startFrom(bitmap) {
  for (const id of ["image", "mask"]) byId(id).width = byId(id).height = model.size; // also clears it
  const side = Math.min(bitmap.width, bitmap.height);
  const context = byId("image").getContext("2d");
  context.imageSmoothingQuality = "high";
  if (model.gray) context.filter = "grayscale(1)";
  context.fillStyle = "white"; // behind transparent pixels
  context.fillRect(0, 0, model.size, model.size);
  const [left, top] = [(bitmap.width - side) / 2, (bitmap.height - side) / 2];
  context.drawImage(bitmap, left, top, side, side, 0, 0, model.size, model.size);
  byId("original").hidden = false;
  byId("start").open = true;
  setStrength(0.6);
}

async function startFromFile(file) {
  try {
    startFrom(await createImageBitmap(file));
    say("Press Draw to vary the image, or paint over a part to redraw only that.");
  } catch {
    say(`${file.name} is not an image that this browser can read.`, true);
  }
}

function setStrength(value) {
  byId("strength").value = value;
  const percent = Math.round(100 * byId("strength").value);
  byId("shown").textContent = `${percent} %`;
  byId("hint").textContent = isPainted() ? "The painted part is redrawn, and the rest is kept."
    : "Paint over a part to redraw only that.";
}

function paint(event) {
  if (event.buttons !== 1) return;
  const canvas = byId("mask");
  const box = canvas.getBoundingClientRect();
  const scale = canvas.width / box.width;
  const context = paintLayer();
  const fresh = event.type === "pointerdown";
  if (fresh) canvas.setPointerCapture(event.pointerId);
  const points = fresh ? [event] : event.getCoalescedEvents?.() ?? [event];
  context.strokeStyle = "#e0491f";
  context.lineCap = context.lineJoin = "round";
  context.lineWidth = (byId("brush").value / 20) * canvas.width;
  context.beginPath();
  if (!fresh) context.moveTo(...canvas.last);
  for (const point of points) {
    canvas.last = [(point.clientX - box.left) * scale, (point.clientY - box.top) * scale];
    context.lineTo(...canvas.last);
  }
  context.stroke();
}

function painted() {
  setStrength(isPainted() ? 1 : 0.6);
}

// The version that answers

function update(view) {
  document.title = view.title;
  if (JSON.stringify([view.head, view.fields]) === version) return;
  if (model && view.model && model.version !== view.model.version)
    say(`Version ${view.model.version} answers now.`);
  const changed = model?.size !== view.model?.size;
  version = JSON.stringify([view.head, view.fields]);
  model = view.model;
  byId("head").innerHTML = view.head;
  byId("play").hidden = model === null;
  if (model === null) return;
  const fields = () => [...byId("form").elements].filter((field) => field.name);
  const chosen = fields().filter((field) => field.value !== field.dataset.initial);
  byId("fields").innerHTML = view.fields;
  for (const field of fields()) field.dataset.initial = field.value;
  for (const field of chosen) setField(field.name, field.value);
  if (changed) byId("original").hidden = true; // it has the size of another model
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  draw(request());
});
byId("form").addEventListener("click", (event) => {
  if (event.target.id === "dice") setField("seed", Math.floor(Math.random() * 1e6));
});
byId("stop").addEventListener("click", () => running?.abort());
byId("close").addEventListener("click", () => byId("dialog").close());
byId("dialog").addEventListener("click", (event) => {
  if (event.target === byId("dialog")) byId("dialog").close(); // outside of it
});
byId("classes").addEventListener("click", () => drawLike({ class: undefined, every_class: true }));
byId("between").addEventListener("submit", (event) => {
  event.preventDefault();
  drawLike({ n: BLEND, toward: Number(byId("toward").value) });
});
byId("same").addEventListener("click", () => {
  byId("dialog").close();
  const values = { ...opened, prompt: opened.source.prompt ?? "", first: opened.number, n: 1 };
  for (const [name, value] of Object.entries(values)) setField(name, value);
  byId("fields").querySelector("details").open = true;
  byId("form").scrollIntoView({ behavior: "smooth", block: "nearest" });
  byId("fields").querySelector("select, input").focus();
  say("The form has the settings of that image. Change one, and press Draw.");
});
byId("use").addEventListener("click", () => {
  byId("dialog").close();
  createImageBitmap(byId("large")).then(startFrom);
  setField("class", opened.class ?? "");
  setField("prompt", opened.source.prompt ?? "");
  byId("start").scrollIntoView({ behavior: "smooth", block: "nearest" });
  say("Press Draw to vary the image, or paint over a part to redraw only that.");
});
byId("file").addEventListener("change", (event) => {
  if (event.target.files.length) startFromFile(event.target.files[0]);
});
byId("strength").addEventListener("input", (event) => setStrength(event.target.value));
byId("mask").addEventListener("pointerdown", paint);
byId("mask").addEventListener("pointermove", paint);
byId("mask").addEventListener("pointerup", painted);
byId("clear").addEventListener("click", () => {
  byId("mask").width = byId("mask").width; // clears it
  setStrength(0.6);
});
byId("remove").addEventListener("click", () => {
  byId("original").hidden = true;
  byId("file").value = "";
});
follow(update, 5000);
