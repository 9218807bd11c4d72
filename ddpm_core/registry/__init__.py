"""The registered model: what goes into a version, what it answers, which one is the champion.

register   the verb: the best checkpoint becomes a version
package    the folder of a version, its signature and requirements, and its upload
card       the model card, for people
gate       which of two models is the champion, and why
models     versions on the server: found, downloaded, tagged
request    a request to a served model, and what is wrong with it
serving    what is served: requests in, images out
served     the script that MLflow loads
current    the champion of the moment, found again and again
server     HTTP around it: `ddpm serve`
"""
