/** Image files as input of the model in a page: decoded by the browser, scaled and cropped like regard/data/images/image_decoding.py. */

/** Decodes an image file to the size of the model's input. @param {Blob} file @param {number[]} shape height, width and channels @returns {Promise<Uint8Array>} */
export async function readPixels(file, [height, width, channels]) {
  // Color profiles are ignored, as by Pillow.
  const bitmap = await createImageBitmap(file, { colorSpaceConversion: "none" }).catch(() => {
    throw new Error("This file is not an image that the browser can open. Choose a PNG, JPEG or WebP file.");
  });
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width, height });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.imageSmoothingQuality = "high";
  // Transparent areas are white.
  context.fillStyle = "white";
  context.fillRect(0, 0, width, height);
  // The image covers the input; its center is kept.
  const scale = Math.max(height / bitmap.height, width / bitmap.width);
  const [innerWidth, innerHeight] = [width / scale, height / scale];
  context.drawImage(bitmap, (bitmap.width - innerWidth) / 2, (bitmap.height - innerHeight) / 2, innerWidth, innerHeight, 0, 0, width, height);
  bitmap.close();
  return toChannels(context.getImageData(0, 0, width, height).data, channels);
}

/** @param {Uint8ClampedArray} rgba @param {number} channels 3, or 1 for the luminance (ITU-R 601-2, with the rounding of Pillow) @returns {Uint8Array} */
export function toChannels(rgba, channels) {
  const out = new Uint8Array((rgba.length / 4) * channels);
  for (let i = 0, at = 0; i < rgba.length; i += 4) {
    const [red, green, blue] = [rgba[i], rgba[i + 1], rgba[i + 2]];
    if (channels === 1) out[at++] = (19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16;
    else for (const value of [red, green, blue]) out[at++] = value;
  }
  return out;
}
