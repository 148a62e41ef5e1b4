// Figure 3, upper part: what lies in the bucket after each version, and what two replicas take out of it.

import { bytesText, choice, h, onWidth, picture, s, scientific, slider, table, tick } from "explain/dom";
import { inside } from "explain/inside";
import { Player } from "explain/player";

const VERSIONS = 8;
// The empty bucket, the anchor, eight deltas.
const FRAMES = VERSIONS + 2;
const ANCHOR_SIDE = 64;
const ROWS = { anchors: 0, deltas: 84, skips: 132, axis: 178, follows: 206, late: 256, height: 304 };

const kindOf = (hop) => (hop.base === null ? "anchor" : hop.version - hop.base > 1 ? "skip" : "delta");
const nameOf = (hop) => (hop.base === null ? `anchor ${hop.version}` : `${hop.base} → ${hop.version}`);
const sum = (hops) => hops.reduce((total, hop) => total + hop.bytes, 0);

export function bucket(section, data) {
  const names = Object.keys(data.recordings);
  const state = { recording: names[0], joins: 6, skips: true, anchors: false };
  const stage = section.querySelector("[data-stage]");
  let width = 0;
  const field = inside(section, data);

  const hops = () =>
    data.recordings[state.recording].bucket.hops.filter(
      (hop) =>
        (state.skips || kindOf(hop) !== "skip") && (state.anchors || kindOf(hop) !== "anchor" || hop.version === 0),
    );

  /** What the replica that joins late fetches, as deltawire's own planner chose: the way in, then each delta. */
  function lateLinks(version) {
    const { hops: all, plans } = data.recordings[state.recording].bucket;
    if (version < state.joins) return [];
    const joined = plans[`skips=${Number(state.skips)} anchors=${Number(state.anchors)}`][state.joins].map(
      (i) => all[i],
    );
    return [
      ...joined,
      ...all.filter((hop) => kindOf(hop) === "delta" && hop.version > state.joins && hop.version <= version),
    ];
  }

  const followLinks = (version) =>
    data.recordings[state.recording].bucket.hops.filter(
      (hop) => hop.version <= version && (kindOf(hop) === "delta" || hop.version === 0),
    );

  function draw(position) {
    if (!width) return;
    const at = position * (FRAMES - 1);
    const frame = Math.floor(at + 1e-6);
    const part = at - frame < 1e-6 ? 0 : at - frame;
    const version = frame - 1;
    const present = hops().filter((hop) => hop.version <= version);
    const landing = part ? hops().filter((hop) => hop.version === version + 1) : [];
    const narrow = width < 600;
    const left = narrow ? 0 : 120;
    const column = (width - left - (narrow ? 30 : 60)) / VERSIONS;
    const x = (number) => left + (narrow ? 14 : 24) + number * column;
    const side = (hop) => ANCHOR_SIDE * Math.sqrt(hop.bytes / hops()[0].bytes);
    const row = (text, y) => s("text", { class: "lane", x: 0, y: y + 4 }, text);

    const object = (hop, fall) => {
      const size = side(hop);
      const kind = kindOf(hop);
      const top =
        kind === "anchor"
          ? ROWS.anchors + 8 + ANCHOR_SIDE - size
          : (kind === "delta" ? ROWS.deltas : ROWS.skips) + 12 - size / 2;
      const y = top - (1 - fall) * 30;
      const start = kind === "anchor" ? x(hop.version) - 8 : x(hop.version) - size / 2;
      return s(
        "g",
        { class: kind, opacity: fall },
        kind === "skip"
          ? s("path", { class: "span", d: `M ${x(hop.base)} ${y + size / 2} H ${x(hop.version)}` })
          : null,
        s("rect", { x: start, y, width: size, height: size }),
        kind === "anchor"
          ? s(
              "text",
              { class: "size", x: start + size / 2, y: y + size / 2 + 4, "text-anchor": "middle" },
              bytesText(hop.bytes),
            )
          : null,
        !narrow && kind === "delta"
          ? s(
              "text",
              { class: "axis", x: x(hop.version), y: ROWS.deltas + 31, "text-anchor": "middle" },
              bytesText(hop.bytes),
            )
          : null,
        !narrow && kind === "skip"
          ? s(
              "text",
              { class: "axis", x: (x(hop.base) + x(hop.version)) / 2, y: ROWS.skips + 5, "text-anchor": "middle" },
              `${nameOf(hop)}: ${bytesText(hop.bytes)}`,
            )
          : null,
      );
    };

    const replica = (taken, y, text, label) => {
      const last = taken.at(-1);
      const marks = taken.map((hop) => {
        const kind = kindOf(hop);
        return kind === "anchor"
          ? s("circle", { class: "anchor", cx: x(hop.version), cy: y, r: 5 })
          : s("path", {
              class: kind,
              d: `M ${x(hop.base)} ${y} Q ${(x(hop.base) + x(hop.version)) / 2} ${y - 22} ${x(hop.version)} ${y}`,
            });
      });
      return s(
        "g",
        { class: "replica" },
        narrow ? null : row(label, y),
        s("line", { class: "rail", x1: x(0), x2: x(VERSIONS), y1: y, y2: y }),
        marks,
        last ? s("circle", { class: "here", cx: x(last.version), cy: y, r: 8 }) : null,
        last ? s("text", { class: "in", x: x(last.version), y: y + 4 }, last.version) : null,
        s("text", { class: "axis", x: x(0), y: y + 24 }, text),
      );
    };

    const shown = Math.max(version, -1);
    const following = followLinks(shown);
    const late = lateLinks(shown);
    const label =
      version < 0
        ? "An empty bucket."
        : `Version ${version}: the bucket holds ${present.length} ` +
          `object${present.length === 1 ? "" : "s"}, ${bytesText(sum(present))}. ` +
          `Replica A has fetched ${bytesText(sum(following))}; B ` +
          (late.length ? `has fetched ${late.map(nameOf).join(", ")}: ${bytesText(sum(late))}.` : "has not joined.");
    const deltas = present.filter((hop) => kindOf(hop) === "delta");
    const objects = (list) => `${list.length} object${list.length === 1 ? "" : "s"}, ${bytesText(sum(list))}`;
    const many = deltas.length ? Math.round(hops()[0].bytes / (sum(deltas) / deltas.length)) : 0;
    stage.replaceChildren(
      picture(
        width,
        ROWS.height,
        label,
        s("rect", {
          class: "bucket",
          x: left ? left - 8 : 0,
          y: 0.5,
          width: width - (left ? left - 8 : 0) - 1,
          height: ROWS.axis - 14,
          rx: 8,
        }),
        narrow
          ? null
          : [row("anchors", ROWS.anchors + 44), row("deltas", ROWS.deltas + 12), row("skip deltas", ROWS.skips + 12)],
        many && width > 340 && !state.anchors
          ? s(
              "text",
              { class: "axis", x: x(0) + ANCHOR_SIDE + 8, y: ROWS.anchors + 44 },
              `weighs as much as ${many} deltas`,
            )
          : null,
        present.map((hop) => object(hop, 1)),
        landing.map((hop) => object(hop, part)),
        Array.from({ length: VERSIONS + 1 }, (_, i) =>
          s(
            "text",
            {
              class: i === version ? "axis strong" : "axis",
              x: x(i),
              y: ROWS.axis + 4,
              "text-anchor": "middle",
            },
            narrow ? i : `v${i}`,
          ),
        ),
        replica(
          following,
          ROWS.follows + 16,
          `${narrow ? "A follows: " : ""}fetched ${objects(following)}`,
          "A follows",
        ),
        replica(
          late,
          ROWS.late + 16,
          (narrow ? "B " : "") +
            (late.length ? `joined at v${state.joins}: fetched ${objects(late)}` : `will join at v${state.joins}`),
          "B joins late",
        ),
      ),
    );
    Object.assign(section.dataset, {
      version,
      bucketBytes: sum(present),
      late: late.map(nameOf).join(", "),
      lateBytes: sum(late),
      followBytes: sum(following),
    });
    section.querySelector("[data-status]").textContent = `${label} ${
      version > 0
        ? `All weights at each version would have been ${bytesText((version + 1) * hops()[0].bytes)} for each replica.`
        : ""
    }`;
    field.show(state.recording, Math.max(version, 1));
    const rows = hops().map((hop) => [
      nameOf(hop),
      kindOf(hop) === "skip" ? "skip delta" : kindOf(hop),
      bytesText(hop.bytes),
    ]);
    section
      .querySelector("[data-numbers]")
      .replaceChildren(table("What lies in the bucket in the end", ["Object", "Kind", "Bytes"], rows));
  }

  const again = () => player.show();
  const joins = slider(
    "B joins at version",
    Array.from({ length: VERSIONS }, (_, i) => i + 1),
    state.joins,
    String,
    (value) => {
      state.joins = value;
      again();
    },
  );
  joins.dataset.input = "joins";
  section.querySelector("[data-controls]").append(
    choice(
      "Recording",
      names.map((name) => [name, `learning rate ${scientific(data.recordings[name].lr)}`]),
      state.recording,
      (value) => {
        state.recording = value;
        again();
      },
    ),
    joins,
    h(
      "div",
      { class: "ticks" },
      tick("skip deltas", state.skips, (on) => {
        state.skips = on;
        again();
      }),
      tick("a second anchor at version 5", state.anchors, (on) => {
        state.anchors = on;
        again();
      }),
    ),
  );
  const player = new Player(section, {
    seconds: 10,
    start: 1,
    draw,
    stops: () => Array.from({ length: FRAMES }, (_, i) => i / (FRAMES - 1)),
  });
  onWidth(stage, (now) => {
    width = now;
    field.resize(now);
    player.show();
  });
  player.show();
}
