// What the page knows: the state as it was last sent, and all notes so far.

const MOST_NOTES = 2000;

export class Model {
  constructor() {
    this.state = null;
    this.notes = [];
  }

  add(notes) {
    this.notes.push(...notes.map((note) => (note.kind === "resumed" ? { ...note, level: "note", part: "trainer" } : note)));
    if (this.notes.length > 2 * MOST_NOTES) this.notes.splice(0, this.notes.length - MOST_NOTES);
  }
}
