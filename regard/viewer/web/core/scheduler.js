/** Long computations, done in slices so that the page stays responsive. */

/** Duration of a slice in milliseconds. */
const SLICE = 12;

/**
 * A queue of jobs. A job is a function that does a little work and returns whether there is more. Jobs with a smaller
 * priority value run first; a job replaces an earlier one with the same key.
 */
export class Work {
  /** @param {(busy: boolean) => void} told called when work starts and when all of it is done */
  constructor(told) {
    this.told = told;
    /** @type {Map<string, {when: number, step: () => boolean}>} */
    this.jobs = new Map();
    this.running = false;
    const channel = new MessageChannel();
    channel.port1.onmessage = () => this.slice();
    this.next = () => channel.port2.postMessage(0);
    this.close = () => {
      this.jobs.clear();
      channel.port1.close();
    };
  }

  /** @param {string} key @param {number} when @param {() => boolean} step */
  add(key, when, step) {
    this.jobs.set(key, { when, step });
    if (!this.running) {
      this.running = true;
      this.told(true);
      this.next();
    }
  }

  /** @param {string} key */
  drop(key) {
    this.jobs.delete(key);
  }

  slice() {
    const end = performance.now() + SLICE;
    while (this.jobs.size && performance.now() < end) {
      const [key, job] = [...this.jobs].reduce((first, one) => (one[1].when < first[1].when ? one : first));
      let more = false;
      try {
        more = job.step();
      } catch (error) {
        reportError(error);
      }
      // A step may have replaced its own job.
      if (!more && this.jobs.get(key) === job) this.jobs.delete(key);
    }
    if (this.jobs.size) this.next();
    else {
      this.running = false;
      this.told(false);
    }
  }
}
