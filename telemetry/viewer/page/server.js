// The viewer's API.

const PATIENCE_MS = 10000;

/** An answer that is no success; `status` is HTTP's. */
export class Refused extends Error {
  constructor(status) {
    const locked = status === 401 && "the viewer wants a key: open this page once with ?key=YOUR_KEY";
    super(locked || `the viewer answered ${status}`);
    this.status = status;
  }
}

/** No answer, none in time, or half of one. */
export class Silent extends Error {}

/** The JSON at `path`, an address relative to the page's. */
export async function ask(path) {
  const signal = AbortSignal.timeout(PATIENCE_MS);
  let answer;
  try {
    answer = await fetch(path, { headers: { accept: "application/json" }, cache: "no-store", signal });
    if (answer.ok) return await answer.json();
  } catch (error) {
    throw new Silent("no answer", { cause: error });
  }
  throw new Refused(answer.status);
}

/** The same, or `otherwise` when the viewer answers with one of `statuses`. */
export async function askOr(path, statuses, otherwise) {
  try {
    return await ask(path);
  } catch (error) {
    if (error instanceof Refused && statuses.includes(error.status)) return otherwise;
    throw error;
  }
}
