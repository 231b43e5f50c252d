// Figures over time, from the server's Prometheus text (/metrics): counters become rates, histograms means and
// quantiles of what came in between two looks.

const WINDOW_S = 10; // latencies are of the requests and tokens of this time
const RATE_S = 2.5; // rates are means of this time, so that one step more or less is no peak
const KEPT_S = 120;
const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LE = /(?:^|,)le="([^"]*)"/;

/** The samples of the text: sums over labels by name, and cumulative counts of histograms by upper bound. */
export function parse(text) {
  const values = new Map();
  const buckets = new Map();
  for (const line of text.split("\n")) {
    if (line.startsWith("#")) continue;
    const [, name, labels, number] = SAMPLE.exec(line) ?? [];
    if (name === undefined) continue;
    const bound = LE.exec(labels ?? "")?.[1];
    if (bound === undefined) {
      values.set(name, (values.get(name) ?? 0) + Number(number));
      continue;
    }
    const histogram = name.replace(/_bucket$/, "");
    const counts = buckets.get(histogram) ?? new Map();
    const upper = bound === "+Inf" ? Infinity : Number(bound);
    counts.set(upper, (counts.get(upper) ?? 0) + Number(number));
    buckets.set(histogram, counts);
  }
  return { values, buckets };
}

/** The `part` quantile (0 to 1) of what lies between two cumulative histograms, interpolated within a bucket;
    null: nothing does. */
export function quantile(before, after, part) {
  const bounds = [...after.keys()].sort((a, b) => a - b);
  const counts = bounds.map((bound) => after.get(bound) - (before?.get(bound) ?? 0));
  const rank = part * (counts.at(-1) ?? 0);
  if (!rank) return null;
  const i = counts.findIndex((count) => count >= rank);
  const lower = i > 0 ? bounds[i - 1] : 0;
  if (bounds[i] === Infinity) return lower;
  const under = i > 0 ? counts[i - 1] : 0;
  return lower + (bounds[i] - lower) * ((rank - under) / (counts[i] - under));
}

/** Points in time, at most KEPT_S old; each has the figures of the moment, null where there are none. */
export class History {
  constructor() {
    this.samples = []; // {at, values, buckets}, the last WINDOW_S
    this.points = [];
  }

  /** Takes in a text that was read at `at`, in seconds. -> the new point */
  add(at, text) {
    const sample = { at, ...parse(text) };
    const last = this.samples.at(-1);
    const name = "runtime_generated_tokens_total";
    if (last && sample.values.get(name) < last.values.get(name)) this.samples = []; // the server has begun anew
    const recent = this.samples.findLast((one) => at - one.at >= RATE_S) ?? this.samples[0] ?? sample;
    const point = this.point(this.samples[0] ?? sample, recent, sample);
    this.samples.push(sample);
    while (at - this.samples[0].at > WINDOW_S) this.samples.shift();
    this.points.push(point);
    while (at - this.points[0].at > KEPT_S) this.points.shift();
    return point;
  }

  /** `begin`: the oldest sample of the window of latencies; `last`: that of the window of rates. */
  point(begin, last, now) {
    const value = (name) => now.values.get(name) ?? 0;
    const grown = (name, since) => value(name) - (since.values.get(name) ?? 0);
    const seconds = now.at - last.at;
    const rate = (name) => (seconds > 0 ? grown(name, last) / seconds : null);
    const mean = (name) =>
      grown(`${name}_count`, begin) > 0 ? grown(`${name}_sum`, begin) / grown(`${name}_count`, begin) : null;
    const p95 = (name) => quantile(begin.buckets.get(name), now.buckets.get(name) ?? new Map(), 0.95);
    const ttft = "runtime_time_to_first_token_seconds";
    const itl = "runtime_inter_token_latency_seconds";
    const pages = value("runtime_pages") || 1;
    const prompt = grown("runtime_prompt_tokens_total", begin);
    return {
      at: now.at,
      tokensPerS: rate("runtime_generated_tokens_total"),
      promptPerS: rate("runtime_prompt_tokens_total"),
      ttft: mean(ttft),
      ttft95: p95(ttft),
      itl: mean(itl),
      itl95: p95(itl),
      inUse: (value("runtime_used_pages") - value("runtime_cached_pages")) / pages,
      occupied: value("runtime_used_pages") / pages,
      hitRate: prompt > 0 ? grown("runtime_cached_tokens_total", begin) / prompt : null,
      running: value("runtime_running_sequences"),
      waiting: value("runtime_waiting_requests"),
    };
  }
}

export const SPAN_S = KEPT_S;
