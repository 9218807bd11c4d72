"""The model registry: register the best checkpoint, pick the champion, and serve it.

register    the verb: turn the best checkpoint into a version
package     the content of a version, and its upload
formats     write a model as a folder for diffusers, safetensors or ONNX
export      `ddpm export`: such a folder, of the workspace or a version
card        the model card, for people
readme      the card as README.md of such a folder, with Hugging Face's metadata
gate        decide which of two models is the champion, and why
champion    apply that decision: score the champion again, move the alias
models      versions on the server: find, tag, download
request     validate a request for images
serving     a loaded model that draws the images of requests
served      the script that MLflow loads
server      `ddpm serve`: HTTP
current     the champion in memory, and the change to the next one
answering   read, queue and answer requests for images
drawing     the queue, and batches of requests that wait
generate    POST /generate, and its documentation
uploads     images and masks in requests
page        the page to draw images
"""
