/** Long computations, done in slices so that the page stays responsive. */

/** Duration of a slice in milliseconds. */
const SLICE_DURATION = 12;

/**
 * A queue of jobs. A job is a function that does a little work and returns whether there is more. Jobs with a smaller
 * priority value run first; a job replaces an earlier one with the same key.
 */
export class Scheduler {
  /** @param {(busy: boolean) => void} onBusyChange called when work starts and when all of it is done */
  constructor(onBusyChange) {
    this.onBusyChange = onBusyChange;
    /** @type {Map<string, {priority: number, step: () => boolean}>} */
    this.jobs = new Map();
    this.running = false;
    const channel = new MessageChannel();
    channel.port1.onmessage = () => this.slice();
    this.scheduleSlice = () => channel.port2.postMessage(0);
    this.close = () => {
      this.jobs.clear();
      channel.port1.close();
    };
  }

  /** @param {string} key @param {number} priority @param {() => boolean} step */
  add(key, priority, step) {
    this.jobs.set(key, { priority, step });
    if (!this.running) {
      this.running = true;
      this.onBusyChange(true);
      this.scheduleSlice();
    }
  }

  /** @param {string} key */
  cancel(key) {
    this.jobs.delete(key);
  }

  slice() {
    const end = performance.now() + SLICE_DURATION;
    while (this.jobs.size && performance.now() < end) {
      const [key, job] = [...this.jobs].reduce((first, one) => (one[1].priority < first[1].priority ? one : first));
      let more = false;
      try {
        more = job.step();
      } catch (error) {
        reportError(error);
      }
      // A step may have replaced its own job.
      if (!more && this.jobs.get(key) === job) this.jobs.delete(key);
    }
    if (this.jobs.size) this.scheduleSlice();
    else {
      this.running = false;
      this.onBusyChange(false);
    }
  }
}
