"use strict";
const $ = (id) => document.getElementById(id);
const JEWELS = ["#2549a8", "#2f86c8", "#8fb8e8", "#6a3fa0", "#b3263b", "#d8622c", "#e0a020", "#1c7a55"];
const state = { models: [], model: null, file: null, bitmap: null, maps: null, crop: null, patch: null, pinned: false, turn: 0, patchMaps: new Map() };

// Requests to the server.

const linkToken = new URLSearchParams(location.hash.slice(1)).get("token");
if (linkToken) { storeToken(linkToken); history.replaceState(null, "", location.pathname); }
function storeToken(token) { try { sessionStorage.setItem("token", token); } catch { state.token = token; } }
function token() { try { return sessionStorage.getItem("token") || state.token; } catch { return state.token; } }

async function request(path, options = {}) {
  const headers = token() ? { Authorization: `Bearer ${token()}` } : {};
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch {
    throw new Error("The server is not responding. Is “vitrail serve” still running?");
  }
  if (response.ok) return response;
  if (response.status === 401) $("door").hidden = false;
  const body = await response.json().catch(() => null);
  throw new Error(sentence(body?.error?.message ?? `The server responded with status ${response.status}.`));
}

// A message may begin with the name of a file, which stays as it is.
const sentence = (line) => line.replace(/^[a-z]+(?=[ ,])/, (word) => word[0].toUpperCase() + word.slice(1)) + (/[.!?]$/.test(line) ? "" : ".");

function upload(path, parameters = {}) {
  const form = new FormData();
  form.append("file", state.file, state.file.name || "the pasted image");
  const query = new URLSearchParams({ model: state.model.name, ...parameters });
  return request(`${path}?${query}`, { method: "POST", body: form }).then((response) => response.json());
}

// One image: its prediction, then its attention maps.

async function classify(file, credit = "") {
  const turn = ++state.turn;
  Object.assign(state, { file, maps: null, patch: null, pinned: false });
  state.patchMaps.clear();
  showError("");
  $("frame").classList.add("busy");
  try {
    const started = performance.now();
    const [bitmap, prediction] = await Promise.all([decode(file), upload("/predict")]);
    if (turn !== state.turn) return;
    state.bitmap = bitmap;
    showPrediction(prediction, performance.now() - started);
    $("credit").textContent = credit;
    draw();
    if (state.model.heads.length) {
      const attention = await upload("/attention", { layer: "all" });
      if (turn !== state.turn) return;
      state.maps = attention.maps;
      state.crop = attention.crop;
      draw();
    }
  } catch (error) {
    if (turn === state.turn) {
      showError(error.message);
      $("answer").classList.add("stale");
    }
  } finally {
    if (turn === state.turn) $("frame").classList.remove("busy");
  }
}

// The server may know formats that the browser does not.
const decode = (file) => createImageBitmap(file).catch(() => null);

function showError(message) {
  $("alarm").hidden = !message;
  $("alarm").textContent = message;
}

function showPrediction(prediction, roundTrip) {
  const top = prediction.results[0].top;
  $("intro").hidden = true;
  $("answer").hidden = $("save").hidden = false;
  $("answer").classList.remove("stale");
  $("controls").hidden = !state.model.heads.length;
  $("best").textContent = top[0].label;
  const rows = top.map(({ label, probability }, number) => {
    const row = document.createElement("li");
    row.style.setProperty("--tone", `var(--g${number % 5})`);
    row.append(element("span", "name", label), element("span", "share", percent(probability)), element("div", "bar"));
    const bar = document.createElement("i");
    bar.style.width = "0";
    requestAnimationFrame(() => { bar.style.width = `${100 * probability}%`; });
    row.lastChild.append(bar);
    row.firstChild.title = label;
    return row;
  });
  $("bars").replaceChildren(...rows);
  const { decode, model } = prediction.milliseconds;
  $("times").textContent = `${Math.round(roundTrip)} ms (decoding ${Math.round(decode)} ms, model ${Math.round(model)} ms)`;
}

function element(tag, name, text = "") {
  return Object.assign(document.createElement(tag), { className: name, textContent: text });
}

const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 2 : 1)}%`;

// The canvas: the image, and over it the attention map of a layer and head, or of all layers.

const view = () => document.querySelector("input[name=view]:checked").value;
const layer = () => Number($("layer").value) - 1;
const head = () => document.querySelector("input[name=head]:checked")?.value ?? "mean";
const key = () => (view() === "rollout" ? "rollout" : `${layer()} ${head()}`);

function current() {
  if (view() === "image" || !state.maps) return null;
  if (state.patch !== null) return state.patchMaps.get(key())?.[state.patch] ?? null;
  if (view() === "rollout") return state.maps.find((map) => map.layer === null);
  const heads = state.maps.filter((map) => map.layer === layer());
  if (head() !== "mean") return heads[Number(head())];
  const mean = heads[0].values.map((_, n) => heads.reduce((sum, map) => sum + map.values[n], 0) / heads.length);
  return { ...heads[0], values: mean };
}

function draw() {
  const frame = $("frame"), canvas = $("canvas");
  if (!state.bitmap) {
    if (state.turn && !$("answer").hidden) $("hint").textContent = "This browser cannot display the format, but the model can read it";
    canvas.hidden = true;
    frame.classList.add("empty");
    return;
  }
  frame.classList.remove("empty");
  canvas.hidden = false;
  fit(canvas, frame);
  const pen = canvas.getContext("2d");
  pen.imageSmoothingQuality = "high";
  pen.drawImage(state.bitmap, 0, 0, canvas.width, canvas.height);
  const map = current();
  if (map) drawMap(pen, map, cropBox(canvas));
  if (map && state.patch !== null) outlinePatch(pen, map.grid, cropBox(canvas));
  canvas.dataset.map = map ? [key(), state.patch ?? "answer"].join(" ") : "";
  $("caption").textContent = caption(map);
  canvas.setAttribute("aria-label", `The image. ${$("caption").textContent} Use the arrow keys to select a patch.`);
}

function fit(canvas, frame) {
  const phone = matchMedia("(max-width: 900px)").matches;
  const room = [frame.clientWidth, phone ? 0.62 * innerHeight : frame.clientHeight];
  const scale = Math.min(room[0] / state.bitmap.width, room[1] / state.bitmap.height);
  const size = [state.bitmap.width, state.bitmap.height].map((side) => Math.max(1, side * scale));
  const dots = Math.min(devicePixelRatio || 1, 2);
  canvas.style.width = `${size[0]}px`;
  canvas.style.height = `${size[1]}px`;
  [canvas.width, canvas.height] = size.map((side) => Math.round(side * dots));
}

function cropBox(canvas) {
  const [left, top, right, bottom] = state.crop;
  return { x: left * canvas.width, y: top * canvas.height, width: (right - left) * canvas.width, height: (bottom - top) * canvas.height };
}

// The highest 3% are clipped: beside a patch that all heads attend to, nothing else would show.
function brightness(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const low = sorted[0], high = sorted[Math.floor(0.97 * (sorted.length - 1))];
  return values.map((value) => Math.min(1, Math.max(0, (value - low) / (high - low || 1))) ** 0.8);
}

function drawMap(pen, map, box) {
  const { width, height } = pen.canvas;
  pen.fillStyle = "rgb(9 10 14 / .66)";
  pen.beginPath();
  pen.rect(0, 0, width, height);
  pen.rect(box.x, box.y, box.width, box.height);
  pen.fill("evenodd");
  ($("panes").checked ? drawGlass : drawShade)(pen, brightness(map.values), map.grid, box);
}

function drawGlass(pen, light, [rows, columns], box) {
  const wide = box.width / columns, high = box.height / rows;
  const each = (paint) => light.forEach((value, n) => paint(value, box.x + (n % columns) * wide, box.y + Math.floor(n / columns) * high));
  pen.globalCompositeOperation = "soft-light";
  each((value, x, y) => { pen.fillStyle = glow(value, 1, 0.7); pen.fillRect(x, y, wide, high); });
  pen.globalCompositeOperation = "source-over";
  each((value, x, y) => { pen.fillStyle = glow(value, 0.3, 0.9 * (1 - value)); pen.fillRect(x, y, wide, high); });
  pen.strokeStyle = "rgb(12 13 18 / .6)";
  pen.lineWidth = Math.max(1, wide / 22);
  pen.beginPath();
  for (let n = 0; n <= columns; n++) { pen.moveTo(box.x + n * wide, box.y); pen.lineTo(box.x + n * wide, box.y + box.height); }
  for (let n = 0; n <= rows; n++) { pen.moveTo(box.x, box.y + n * high); pen.lineTo(box.x + box.width, box.y + n * high); }
  pen.stroke();
}

// From dark blue to bright gold.
function glow(value, bright, opacity) {
  const stops = [[37, 73, 168], [106, 63, 160], [190, 50, 70], [240, 180, 60]];
  const at = value * 2.999, low = Math.floor(at), share = at - low;
  const mixed = stops[low].map((part, n) => Math.round(bright * (part + share * (stops[low + 1][n] - part))));
  return `rgb(${mixed.join(" ")} / ${opacity})`;
}

// One more row and column on every side, equal to its neighbor: blurring would fade the edges.
function drawShade(pen, light, [rows, columns], box) {
  const small = document.createElement("canvas");
  [small.width, small.height] = [columns + 2, rows + 2];
  const dots = new ImageData(columns + 2, rows + 2);
  for (let y = 0; y < rows + 2; y++) for (let x = 0; x < columns + 2; x++) {
    const row = Math.min(rows, Math.max(1, y)) - 1, column = Math.min(columns, Math.max(1, x)) - 1;
    dots.data.set([9, 10, 14, 225 * (1 - light[row * columns + column])], 4 * (y * (columns + 2) + x));
  }
  small.getContext("2d").putImageData(dots, 0, 0);
  const wide = box.width / columns, high = box.height / rows;
  pen.save();
  pen.beginPath();
  pen.rect(box.x, box.y, box.width, box.height);
  pen.clip();
  pen.filter = `blur(${wide / 3}px)`;
  pen.drawImage(small, box.x - wide, box.y - high, box.width + 2 * wide, box.height + 2 * high);
  pen.restore();
}

function outlinePatch(pen, [rows, columns], box) {
  const wide = box.width / columns, high = box.height / rows;
  const x = box.x + (state.patch % columns) * wide, y = box.y + Math.floor(state.patch / columns) * high;
  const line = Math.max(2, wide / 9);
  pen.lineWidth = line + 3;
  pen.strokeStyle = "rgb(9 10 14 / .85)";
  pen.strokeRect(x, y, wide, high);
  pen.lineWidth = line;
  pen.strokeStyle = "#ffd35c";
  pen.strokeRect(x, y, wide, high);
}

function caption(map) {
  if (view() === "image" || !state.maps) return "";
  const where = view() === "rollout" ? "All layers combined" : `Layer ${layer() + 1}, ${head() === "mean" ? "mean of its heads" : `head ${Number(head()) + 1}`}`;
  if (state.patch === null) return `${where}: what the prediction attends to.`;
  const columns = state.maps[0].grid[1];
  const position = `row ${Math.floor(state.patch / columns) + 1}, column ${(state.patch % columns) + 1}`;
  return `${where}: what the patch in ${position} attends to${map ? "." : " …"}`;
}

// The selected patch. Its map comes with those of all other patches, once for each layer and head.

let timer = 0;
function selectPatch(patch) {
  if (!state.maps || !state.model.patches || view() === "image") return;
  if (patch === state.patch) return;
  state.patch = patch;
  if (patch !== null && !state.patchMaps.has(key())) {
    clearTimeout(timer);
    timer = setTimeout(fetchPatchMaps, 60);
  }
  draw();
}

async function fetchPatchMaps() {
  const name = key(), turn = state.turn;
  if (state.patchMaps.has(name) || state.patch === null) return;
  const which = view() === "rollout" ? { layer: "rollout" } : { layer: layer(), head: head() };
  try {
    state.patchMaps.set(name, null);
    const attention = await upload("/attention", { ...which, patch: "all" });
    if (turn !== state.turn) return;
    state.patchMaps.set(name, attention.maps);
    draw();
  } catch (error) {
    state.patchMaps.delete(name);
    if (turn === state.turn) showError(error.message);
  }
}

function patchAt(event) {
  const canvas = $("canvas"), edge = canvas.getBoundingClientRect(), box = cropBox(canvas);
  const x = ((event.clientX - edge.left) / edge.width) * canvas.width, y = ((event.clientY - edge.top) / edge.height) * canvas.height;
  const [rows, columns] = state.maps[0].grid;
  const column = Math.floor(((x - box.x) / box.width) * columns), row = Math.floor(((y - box.y) / box.height) * rows);
  return row < 0 || column < 0 || row >= rows || column >= columns ? null : row * columns + column;
}

$("canvas").addEventListener("pointermove", (event) => {
  if (state.maps && !state.pinned && event.pointerType === "mouse") selectPatch(patchAt(event));
});
$("canvas").addEventListener("pointerleave", () => { if (!state.pinned) selectPatch(null); });
$("canvas").addEventListener("click", (event) => {
  if (!state.maps) return;
  const patch = patchAt(event);
  const again = state.pinned && patch === state.patch;
  state.pinned = !again && patch !== null;
  selectPatch(again ? null : patch);
});
$("canvas").addEventListener("keydown", (event) => {
  const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  if (!state.maps || !steps[event.key]) return;
  event.preventDefault();
  const [rows, columns] = state.maps[0].grid, [down, right] = steps[event.key];
  const from = state.patch ?? Math.floor(rows / 2) * columns + Math.floor(columns / 2);
  const row = Math.min(rows - 1, Math.max(0, Math.floor(from / columns) + down));
  const column = Math.min(columns - 1, Math.max(0, (from % columns) + right));
  state.pinned = true;
  selectPatch(row * columns + column);
});

// Controls.

function changed() {
  $("depth").classList.toggle("off", view() !== "layer");
  $("layer-name").textContent = `${layer() + 1} of ${state.model.heads.length}`;
  if (state.patch !== null && !state.patchMaps.has(key())) fetchPatchMaps();
  draw();
}

function chooseLayer() { $("view-layer").checked = true; drawHeads(); changed(); }

function drawHeads() {
  const count = state.model.heads[layer()] ?? 0, before = head();
  if ($("heads").children.length === 2 * (count + 1)) return;
  const names = ["mean", ...Array(count).keys()];
  $("heads").replaceChildren(...names.flatMap((name) => {
    const input = Object.assign(document.createElement("input"), { type: "radio", name: "head", id: `head-${name}`, value: name, checked: String(name) === before });
    const label = element("label", "", name === "mean" ? "All heads" : `${name + 1}`);
    label.htmlFor = input.id;
    return [input, label];
  }));
  if (!document.querySelector("input[name=head]:checked")) $("head-mean").checked = true;
}

document.querySelectorAll("input[name=view]").forEach((input) => input.addEventListener("change", changed));
$("layer").addEventListener("input", chooseLayer);
$("heads").addEventListener("change", chooseLayer);
$("panes").addEventListener("change", draw);
$("model").addEventListener("change", () => { useModel(state.models[$("model").selectedIndex]); if (state.file) classify(state.file, $("credit").textContent); });
$("file").addEventListener("change", () => { if ($("file").files[0]) classify($("file").files[0]); $("file").value = ""; });
$("choose").addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); $("file").click(); } });
$("save").addEventListener("click", () => $("canvas").toBlob((blob) => {
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: "vitrail.png" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}));
$("door").addEventListener("submit", (event) => { event.preventDefault(); storeToken($("token").value); $("door").hidden = true; showError(""); start(); });

document.addEventListener("keydown", (event) => {
  if (event.target.matches("input[type=password], select") || event.ctrlKey || event.metaKey || !state.maps) return;
  if (event.key === "Escape") { state.pinned = false; selectPatch(null); }
  const step = { "[": -1, "]": 1 }[event.key];
  if (step) { $("layer").value = Number($("layer").value) + (view() === "layer" ? step : 0); chooseLayer(); }
});
document.addEventListener("paste", (event) => {
  const file = [...event.clipboardData.files][0];
  if (file) { event.preventDefault(); classify(file); }
});
let inside = 0;
document.addEventListener("dragenter", (event) => { event.preventDefault(); inside++; document.body.classList.add("dragging"); });
document.addEventListener("dragleave", () => { if (--inside <= 0) { inside = 0; document.body.classList.remove("dragging"); } });
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  inside = 0;
  document.body.classList.remove("dragging");
  const file = event.dataTransfer.files[0];
  if (file) classify(file);
});
addEventListener("resize", () => { if (state.bitmap) draw(); });

// The stained-glass window that is shown before any image.

function glassArt() {
  const art = $("glass"), across = 9, down = 11, width = 520, height = 600;
  let seed = 7;
  const chance = () => (seed = (seed * 16807) % 2147483647) / 2147483647;
  const corner = [];
  for (let y = 0; y <= down; y++) for (let x = 0; x <= across; x++) corner.push([(x + (chance() - 0.5) * 0.55) * width / across, (y + (chance() - 0.5) * 0.55) * height / down]);
  const arch = "M8 592V262C8 130 150 52 260 8C370 52 512 130 512 262V592Z";
  let panes = "";
  for (let y = 0; y < down; y++) for (let x = 0; x < across; x++) {
    const four = [[0, 0], [1, 0], [1, 1], [0, 1]].map(([a, b]) => corner[(y + b) * (across + 1) + x + a]);
    const far = Math.hypot(x + 0.5 - across / 2, (y + 0.5 - down * 0.46) * 0.9) + chance() * 1.3;
    const tone = far < 1.9 ? [6, 6, 5] : far < 2.9 ? [4, 5, 4] : far < 3.9 ? [3, 4, 3] : far < 5 ? [0, 1, 7] : [0, 1, 0, 7];
    panes += `<path d="M${four.map((p) => p.map((v) => v.toFixed(1)).join(" ")).join("L")}Z" fill="${JEWELS[tone[Math.floor(chance() * tone.length)]]}" opacity="${(0.72 + 0.28 * chance()).toFixed(2)}"/>`;
  }
  art.innerHTML = `<defs><clipPath id="lancet"><path d="${arch}"/></clipPath><radialGradient id="sun" cx=".5" cy=".44" r=".62"><stop offset="0" stop-color="#fff4cf" stop-opacity=".55"/><stop offset=".5" stop-color="#fff" stop-opacity=".06"/><stop offset="1" stop-color="#05060a" stop-opacity=".5"/></radialGradient></defs><g clip-path="url(#lancet)"><g id="panes-of-art" stroke="#0b0d12" stroke-width="5" stroke-linejoin="round">${panes}</g><path d="${arch}" fill="url(#sun)"/></g><path d="${arch}" fill="none" stroke="#0b0d12" stroke-width="12"/><path d="${arch}" fill="none" stroke="#3a3f4c" stroke-width="2"/>`;
  const all = [...$("panes-of-art").children];
  $("frame").addEventListener("pointermove", (event) => {
    if ($("canvas").hidden) for (const pane of all) {
      const box = pane.getBoundingClientRect();
      const far = Math.hypot(box.x + box.width / 2 - event.clientX, box.y + box.height / 2 - event.clientY);
      pane.style.opacity = Math.max(0.5, 1.12 - far / 380);
    }
  });
}

// Startup.

function useModel(model) {
  state.model = model;
  const round = (n) => (n >= 1e6 ? `${(n / 1e6).toFixed(n < 1e7 ? 1 : 0)} M` : n.toLocaleString("en"));
  $("facts").textContent = `${model.variant} · ${round(model.parameters)} parameters · ${model.classes.toLocaleString("en")} classes · ${model.size.join(" × ")} px`;
  const depth = model.heads.length;
  if (!depth) $("controls").hidden = true;
  $("layer").max = Math.max(1, depth);
  $("layer").value = Math.max(1, depth);
  $("heads").replaceChildren();
  drawHeads();
  if (depth) changed();
}

async function start() {
  const local = ["localhost", "127.0.0.1", "[::1]"].includes(location.hostname);
  $("promise").textContent = local
    ? "Your image stays on this machine and is not stored."
    : `Your image is sent only to ${location.host}, where the model runs, and is not stored.`;
  try {
    state.models = (await (await request("/models")).json()).models;
    $("model").replaceChildren(...state.models.map((model) => new Option(model.name)));
    $("choice").hidden = state.models.length < 2;
    useModel(state.models[0]);
    const samples = (await (await request("/samples")).json()).samples;
    $("samples").replaceChildren(...(await Promise.all(samples.map(sampleButton))));
  } catch (error) {
    showError(error.message);
  }
}

async function sampleButton({ name, by }) {
  const blob = await (await request(`/samples/${name}`)).blob();
  const button = element("button", "");
  const image = Object.assign(document.createElement("img"), { src: URL.createObjectURL(blob), alt: `Sample: ${name}` });
  Object.assign(button, { type: "button", title: `${name}, ${by}` });
  button.append(image);
  button.addEventListener("click", () => classify(new File([blob], `${name}.jpg`, { type: blob.type }), `${name}: ${by}`));
  return button;
}

glassArt();
start();
