// What the page knows: the state as it was last sent, and all records so far.

const MOST_NOTES = 2000;

export class Model {
  constructor() {
    this.state = null;
    this.clear();
  }

  clear() {
    this.versions = new Map();
    this.steps = new Map();
    this.notes = [];
    this.sorted = null;
  }

  add(records) {
    const changed = new Set();
    for (const record of records) {
      if (record.kind === "step") {
        this.steps.set(record.step, record);
        changed.add("steps");
      } else if (record.kind === "note") {
        this.notes.push(record);
        changed.add("notes");
      } else if (record.kind === "resumed") {
        for (const step of [...this.steps.keys()]) if (step > record.step) this.steps.delete(step);
        this.notes.push({ ...record, level: "note", part: "trainer" });
        changed.add("steps").add("notes");
      } else {
        this.versions.set(record.version, record);
        this.sorted = null;
        changed.add("versions");
      }
    }
    if (this.notes.length > 2 * MOST_NOTES) this.notes.splice(0, this.notes.length - MOST_NOTES);
    return changed;
  }

  // Rows in order of their versions.
  rows() {
    this.sorted ??= [...this.versions.values()].sort((a, b) => a.version - b.version);
    return this.sorted;
  }

  latest() {
    const rows = this.rows();
    return rows.length ? rows[rows.length - 1] : null;
  }
}
