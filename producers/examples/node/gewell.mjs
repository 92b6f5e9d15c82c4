#!/usr/bin/env node
// A producer in Node: only ioredis (npm install). Usage:
//   node gewell.mjs enqueue ID PROMPT    add a job
//   node gewell.mjs follow ID            stream its answer, whatever is lost on the way
//   node gewell.mjs result ID            print its final record (JSON)
// GEWELL_REDIS and GEWELL_NAMESPACE say where.
import Redis from "ioredis";

const URL = process.env.GEWELL_REDIS ?? "redis://127.0.0.1:6379/0";
const NS = process.env.GEWELL_NAMESPACE ?? "gewell";
const SILENCE_MS = 1000;

const parseId = (text) => text.split("-").map(Number);
const isOld = (id, last) => id[0] < last[0] || (id[0] === last[0] && id[1] <= last[1]);
const isNext = (id, last) => id[0] === last[0] && id[1] === last[1] + 1;

/** Prints every piece of text once and in order. */
class Follower {
  last = ""; // id of the newest entry taken
  at = 0; // characters before the next chunk; less than `shown` while a new epoch repeats what was shown
  shown = 0;
  state = "";
  busy = Promise.resolve(); // one message after another, although reading a range takes time

  constructor(jobId) {
    this.jobId = jobId;
  }

  run() {
    return new Promise((resolve) => {
      // ioredis connects again by itself; each time we subscribe first (1), then read what we missed (5).
      this.link = new Redis(URL, { maxRetriesPerRequest: null });
      this.channel = new Redis(URL, { maxRetriesPerRequest: null, autoResubscribe: false });
      for (const client of [this.link, this.channel]) client.on("error", () => {});
      this.channel.on("ready", () => this.then(async () => {
        await this.channel.subscribe(`${NS}:ev:${this.jobId}`);
        await this.readRange();
      }));
      this.channel.on("message", (_, message) => this.then(() => this.onMessage(message)));
      this.silence = setInterval(() => {
        if (Date.now() - this.heardAt >= SILENCE_MS) this.then(() => this.readRange()); // (4)
      }, SILENCE_MS / 4);
      this.heardAt = Date.now();
      this.done = resolve;
    });
  }

  then(step) {
    this.busy = this.busy.then(step).catch(() => {}).then(() => {
      if (!this.state || !this.done) return;
      clearInterval(this.silence);
      this.link.disconnect();
      this.channel.disconnect();
      this.done(this.state);
      this.done = null;
    });
  }

  async onMessage(message) {
    this.heardAt = Date.now();
    const space = message.indexOf(" ");
    const [entry, payload] = [message.slice(0, space), message.slice(space + 1)];
    const id = parseId(entry);
    const last = this.last ? parseId(this.last) : null;
    if (this.state || (last && isOld(id, last))) return;
    if (last && isNext(id, last)) this.take(entry, "state" in JSON.parse(payload) ? "end" : "d", payload); // (3)
    else await this.readRange(); // a gap, or another epoch
  }

  /** (2) Everything behind `last`, from the stream itself. */
  async readRange() {
    if (this.state) return;
    this.heardAt = Date.now();
    const out = `${NS}:out:${this.jobId}`;
    let rows = await this.link.xrange(out, this.last || "-", "+");
    if (this.last && rows[0]?.[0] !== this.last) { // another stream than was read so far
      this.last = "";
      this.at = 0;
      rows = await this.link.xrange(out, "-", "+");
    }
    for (const [entry, [field, payload]] of rows) if (entry !== this.last) this.take(entry, field, payload);
    if (rows.length) return;
    const raw = await this.link.get(`${NS}:res:${this.jobId}`); // (6) no stream: the record may stand
    if (raw === null) return;
    const record = JSON.parse(raw);
    this.at = 0;
    this.take("", "d", JSON.stringify({ t: record.text, ch: "content" }));
    this.state = record.state;
  }

  take(entry, field, payload) {
    this.last = entry;
    const data = JSON.parse(payload);
    if (field === "d" && data.ch === "content") {
      process.stdout.write(data.t.slice(Math.max(this.shown - this.at, 0)));
      this.at += data.t.length;
      this.shown = Math.max(this.shown, this.at);
    } else if (field === "restart" && data.keep === 0) this.at = 0; // the stream was lost and is written again
    else if (field === "end") this.state = data.state;
  }
}

const [command, jobId, prompt] = process.argv.slice(2);
if (command === "follow" && jobId) {
  const state = await new Follower(jobId).run();
  process.stdout.write("\n");
  process.exitCode = state === "done" ? 0 : 1;
} else if ((command === "enqueue" && prompt) || (command === "result" && jobId)) {
  const link = new Redis(URL);
  if (command === "enqueue") {
    const body = JSON.stringify({ kind: "completion", request: { prompt, max_tokens: 64 } });
    console.log(await link.xadd(`${NS}:jobs:normal`, "*", "v", "1", "id", jobId, "body", body));
  } else {
    const record = await link.get(`${NS}:res:${jobId}`);
    if (record) console.log(record);
    else process.exitCode = 1;
  }
  link.disconnect();
} else {
  console.error("usage: gewell.mjs enqueue ID PROMPT | follow ID | result ID");
  process.exitCode = 2;
}
