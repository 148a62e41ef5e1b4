// Sliders, and the table that the local server computes for them.

const units = (value, list) => {
  let i = 0;
  for (; i < list.length - 1 && value >= 1000; i++) value /= 1000;
  return `${Number(value.toPrecision(3))} ${list[i]}`;
};
const line = (value) => units(value, ["Mbit/s", "Gbit/s", "Tbit/s"]);
const plain = (value) => value.toLocaleString("en-US");
const SPEEDS = [10, 100, 300, 1000, 3000, 10000, 25000, 100000, 400000];

// Name of the plan's number, label, values, the one to begin with, and how it is written.
const SLIDERS = [
  ["weights", "Weights", [1.35e8, 6e8, 1.7e9, 4e9, 8e9, 1.4e10, 3.2e10, 7e10, 2.35e11, 6.71e11, 1e12], 8e9, (v) => units(v / 1e6, ["M", "B", "T"])],
  ["lr", "Learning rate", [1e-7, 3e-7, 1e-6, 2e-6, 3e-6, 5e-6, 1e-5], 1e-6, (v) => v.toExponential()],
  ["steps_a_day", "Steps per day", [10, 24, 50, 100, 288, 720, 1440, 2880, 8640, 86400], 1440, plain],
  ["replicas", "Replicas", [1, 8, 16, 64, 128, 256, 500, 1000, 2000], 64, plain],
  ["sites", "Sites", [1, 2, 3, 5, 8, 16], 2, plain],
  ["trainer_mbits", "Trainer bandwidth", SPEEDS, 1000, line],
  ["site_mbits", "Bandwidth of a site", SPEEDS, 1000, line],
  ["replica_mbits", "Bandwidth inside a site", SPEEDS, 10000, line],
  ["joins_a_day", "Joins and restarts per day", [0, 1, 5, 20, 100, 500], 0, plain],
];
const STORES = [["s3", "S3"], ["gcs", "Google Cloud Storage"], ["r2", "Cloudflare R2"], ["own", "Your own"]];

const values = Object.fromEntries(SLIDERS.map(([name, , , first]) => [name, first]));
values.store = "s3";
const find = (id) => document.getElementById(id);
const make = (tag, attributes = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), attributes);
  element.append(...children);
  return element;
};

function slider([name, label, options, first, text]) {
  const output = make("output", { htmlFor: name, textContent: text(first) });
  const input = make("input", { id: name, type: "range", min: 0, max: options.length - 1, value: options.indexOf(first) });
  input.setAttribute("aria-valuetext", text(first));
  input.addEventListener("input", () => {
    values[name] = options[input.value];
    output.textContent = text(values[name]);
    input.setAttribute("aria-valuetext", output.textContent);
    update();
  });
  return make("div", { className: "control" }, make("label", { htmlFor: name, textContent: label }), output, input);
}

function choice() {
  const select = make("select", { id: "store" }, ...STORES.map(([value, text]) => new Option(text, value)));
  select.addEventListener("change", () => {
    values.store = select.value;
    update();
  });
  return make("div", { className: "control" }, make("label", { htmlFor: "store", textContent: "Prices" }), select);
}

const pairs = (list) => list.flatMap(([name, text]) => [make("dt", { textContent: name }), make("dd", { textContent: text })]);

function draw(data) {
  find("head").replaceChildren(...pairs(data.head));
  find("from").replaceChildren(...pairs(Object.entries(data.from)));
  const [header, ...rows] = data.table;
  const head = make("tr", {}, ...header.map((text, i) => (i ? make("th", { textContent: text, scope: "col" }) : make("td"))));
  const body = rows.map(([name, ...cells]) =>
    make("tr", { className: name.endsWith("costs") ? "total" : "" },
      make("th", { textContent: name, scope: "row" }), ...cells.map((text) => make("td", { textContent: text }))));
  find("table").replaceChildren(make("thead", {}, head), make("tbody", {}, ...body));
}

let asked = 0;
let busy = false;

/** Ask for the newest numbers; while one answer is on its way, only the last change is kept. */
async function update() {
  asked++;
  if (busy) return;
  busy = true;
  while (busy) {
    const number = asked;
    find("state").textContent = "computing";
    try {
      const answer = await fetch(`data?${new URLSearchParams(values)}`);
      const data = await answer.json();
      if (answer.ok) draw(data);
      find("state").textContent = answer.ok ? "" : data.error;
    } catch {
      find("state").textContent = "deltawire estimate --page has stopped: start it again";
    }
    busy = number !== asked;
  }
  document.body.dataset.asked = asked;
}

find("inputs").append(...SLIDERS.map(slider), choice());
update();
