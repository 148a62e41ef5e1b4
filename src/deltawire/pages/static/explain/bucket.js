// Scene 4: files land in the bucket under their names, and two replicas take what they need out of it.

import { bytesText, h, onWidth, picture, s } from "explain/dom";
import { Player } from "explain/player";

const VERSIONS = 8;
// The empty bucket, the anchor, eight deltas.
const FRAMES = VERSIONS + 2;
const ANCHOR_SIDE = 40;
// How many files a narrow page shows.
const LATEST = 9;

const kindOf = (hop) => (hop.base === null ? "anchor" : hop.version - hop.base > 1 ? "skip" : "delta");
const nameOf = (hop) => (hop.base === null ? `anchor ${hop.version}` : `${hop.base} → ${hop.version}`);
const sum = (list) => list.reduce((total, each) => total + (each.bytes ?? 0), 0);

/** What a file is, by its name. */
function fileKind({ key, version }) {
  const base = /from-(\d{8})/.exec(key);
  const kind = base ? (version - Number(base[1]) > 1 ? "skip" : "delta") : /anchor/.test(key) ? "anchor" : "";
  return { kind, extra: kind === "skip" || (kind === "anchor" && version > 0), document: key.endsWith(".json") };
}

export function bucket(section, data, settings) {
  const stage = section.querySelector("[data-stage]");
  const list = section.querySelector("[data-files]");
  let width = 0;
  let rows = [];

  const recorded = () => data.recordings[settings.values.recording].bucket;
  const allowed = (kind, extra) => !extra || (kind === "skip" ? settings.values.skips : settings.values.anchors);

  /** What the replica that joins late fetches, as deltawire's own planner chose: the way in, then each delta. */
  function lateLinks(version) {
    const { joins, skips, anchors } = settings.values;
    const { hops, plans } = recorded();
    if (version < joins) return [];
    const joined = plans[`skips=${Number(skips)} anchors=${Number(anchors)}`][joins].map((i) => hops[i]);
    const since = hops.filter((hop) => hop.version > joins && hop.version <= version);
    return [...joined, ...since.filter((hop) => kindOf(hop) === "delta")];
  }

  const followLinks = (version) =>
    recorded().hops.filter((hop) => hop.version <= version && (kindOf(hop) === "delta" || hop.version === 0));

  function listFiles() {
    const { files } = recorded();
    const largest = Math.max(...files.map((file) => file.bytes ?? 0));
    rows = files
      .map((file) => ({ ...file, ...fileKind(file) }))
      .filter((file) => allowed(file.kind, file.extra))
      .map((file) => {
        const box = h("span", { class: `size ${file.kind}` });
        if (file.bytes) box.style.width = box.style.height = `${ANCHOR_SIDE * Math.sqrt(file.bytes / largest)}px`;
        const item = h(
          "li",
          { class: file.document ? "document" : "" },
          h("span", { class: "icon" }, file.bytes ? box : ""),
          h("code", null, file.key),
          h("span", { class: "number" }, file.bytes ? bytesText(file.bytes) : ""),
        );
        return { file, item };
      });
    list.replaceChildren(...rows.map(({ item }) => item));
  }

  /** A rail of versions with what a replica took. */
  function rail(taken, y, text) {
    const x = (number) => 12 + (number * (width - 24)) / VERSIONS;
    const last = taken.at(-1);
    return s(
      "g",
      { class: "replica" },
      s("text", { class: "title", x: 0, y: y - 34 }, text),
      s("line", { class: "rail", x1: x(0), x2: x(VERSIONS), y1: y, y2: y }),
      Array.from({ length: VERSIONS + 1 }, (_, i) =>
        s("text", { class: "axis", x: x(i), y: y + 24, "text-anchor": "middle" }, i),
      ),
      taken.map((hop) =>
        kindOf(hop) === "anchor"
          ? s("circle", { class: "anchor", cx: x(hop.version), cy: y, r: 6 })
          : s("path", {
              class: kindOf(hop),
              d: `M ${x(hop.base)} ${y} Q ${(x(hop.base) + x(hop.version)) / 2} ${y - 26} ${x(hop.version)} ${y}`,
            }),
      ),
      last ? s("circle", { class: "here", cx: x(last.version), cy: y, r: 9 }) : null,
      last ? s("text", { class: "in", x: x(last.version), y: y + 4 }, last.version) : null,
    );
  }

  function draw(position) {
    if (!width) return;
    const at = position * (FRAMES - 1);
    const done = Math.floor(at + 1e-6) - 1;
    const part = at - done - 1 < 1e-6 ? 0 : at - done - 1;
    // The files of the next version come one after the other; it exists when its manifest does.
    const next = rows.filter(({ file }) => file.version === done + 1);
    const coming = new Set(next.slice(0, Math.floor(part * (next.length + 1))));
    const present = rows.filter((row) => row.file.version <= done || coming.has(row));
    const manifest = `manifests/${String(done + 1).padStart(8, "0")}.json`;
    const version = [...coming].some(({ file }) => file.key === manifest) ? done + 1 : done;
    for (const row of rows) {
      const behind = present.length - 1 - present.indexOf(row);
      row.item.classList.toggle("there", present.includes(row));
      row.item.classList.toggle("earlier", present.includes(row) && behind >= LATEST);
      row.item.classList.toggle("new", row.file.version === done + (part ? 1 : 0) && present.includes(row));
    }
    const { joins } = settings.values;
    const following = followLinks(version);
    const late = lateLinks(version);
    const fetched = (some) => `${some.length} file${some.length === 1 ? "" : "s"}, ${bytesText(sum(some))}`;
    const whole = recorded().hops[0].bytes;
    const files = present.map(({ file }) => file);
    const words =
      version < 0
        ? "An empty bucket."
        : `Version ${version} exists, since its manifest, which is written last, is there. The bucket holds ` +
          `${bytesText(sum(files))} of weights in ${files.filter((file) => !file.document).length} files. ` +
          (version > 0 ? `All weights at every version would take ${bytesText((version + 1) * whole)}.` : "");
    const ofLate = late.length ? `B joined at version ${joins}: ${fetched(late)}` : `B will join at version ${joins}`;
    stage.replaceChildren(
      picture(
        width,
        190,
        `${words} A has fetched ${fetched(following)}; ${ofLate}.`,
        rail(following, 52, `Replica A follows: ${fetched(following)}`),
        rail(late, 150, ofLate),
      ),
    );
    section.querySelector("[data-status]").textContent = words;
    Object.assign(section.dataset, {
      version,
      bucketBytes: sum(files),
      late: late.map(nameOf).join(", "),
      lateBytes: sum(late),
      followBytes: sum(following),
    });
  }

  const player = new Player(section, {
    seconds: 14,
    draw,
    stops: () => Array.from({ length: FRAMES }, (_, i) => i / (FRAMES - 1)),
  });
  settings.panel(section, ["recording", "joins", "skips", "anchors"]);
  settings.listeners.push(() => {
    listFiles();
    player.show();
  });
  listFiles();
  player.once(stage);
  onWidth(stage, (now) => {
    width = now;
    player.show();
  });
}
