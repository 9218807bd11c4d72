"""The model registry: register the best checkpoint, pick the champion, and serve it.

register    the verb: turn the best checkpoint into a version
package     the content of a version, and its upload
card        the model card, for people
gate        decide which of two models is the champion, and why
champion    apply that decision: score the champion again, move the alias
models      versions on the server: find, tag, download
request     validate a request for images
serving     a loaded model that draws the images of requests
served      the script that MLflow loads
server      `ddpm serve`: HTTP, and the current champion
drawing     the queue of requests
connection  deadlines of HTTP connections
"""
