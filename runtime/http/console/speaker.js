// Reads a stream to screen readers: whole sentences, not tokens, and none twice.

const PAUSE_MS = 1200; // between two pieces, so that one can be read before the next comes
const SENTENCE_END = /[.!?。！？:]["')\]]?\s|\n/g;

export class Speaker {
  constructor(region) {
    this.region = region;
    this.said = 0; // characters
    this.lastAt = 0;
  }

  /** The text has grown: says the sentences that are complete. */
  grow(text) {
    if (performance.now() - this.lastAt < PAUSE_MS) return;
    let end = this.said;
    SENTENCE_END.lastIndex = this.said;
    for (let match = SENTENCE_END.exec(text); match; match = SENTENCE_END.exec(text))
      end = SENTENCE_END.lastIndex;
    if (end > this.said) this.say(text, end);
  }

  /** The text is complete: says the rest. */
  end(text) {
    if (text.length > this.said) this.say(text, text.length);
    this.said = 0;
    this.lastAt = 0;
  }

  say(text, end) {
    this.region.textContent = text.slice(this.said, end);
    this.said = end;
    this.lastAt = performance.now();
  }
}
